"""Choosing how a model's recurrent state is kept, with the loss measured, and keeping the choice on disk.

section is the choice as JSON, saved its place in a checkpoint's folder, calibrate what is read from a
text, sensitivity which layers suffer and which are widened, report and plot the figures.
"""
