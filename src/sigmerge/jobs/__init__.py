"""What is done with a recipe: plan, describe, run. A file imports only files above it in this list:
options, work_folder, pools, scores, capture, profile, dense, search, anchor, occupancy, repair,
merge, report, run, demo, verify."""
