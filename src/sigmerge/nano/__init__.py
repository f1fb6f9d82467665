"""The embedded pool: five synthetic domains, their training, their suite and the shipped files.

A bench on which the whole method runs in minutes on a CPU. It is not a claim about large models.
"""
