"""Fuzzing: sound inputs, damaged on purpose, given to everything that reads files of strangers.

    python -m fuzz --minutes 5                    every target in turn; prints a table
    python -m fuzz --target header --only 1234    one input again, with its traceback

An input is either accepted or refused with one of the project's errors, within limits of time and
memory; no file outside its folder is written, and no file of the user is copied into a result. The
n-th input of a target depends on the seed only.
"""
