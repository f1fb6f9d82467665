"""What is done with a recipe: plan, describe, run. A file imports only files above it in this list:
options, steps, work_folder, pools, scores, capture, signatures, profile, dense, emulated, sampled,
foreign, occupancy, fixed_repair, candidates, search, strategies, calls, guide, anchor, calibrate,
repair, adapter, merge, multi_recipe, migration, moe, tokens, tune, report, run, demo, verify, hub,
extract, inspect, trial."""
