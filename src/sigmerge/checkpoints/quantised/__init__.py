"""Quantised weights as plain tensors, one file for each stored form. Nothing is written for it."""
