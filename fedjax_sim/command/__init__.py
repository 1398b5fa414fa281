"""Implements the command line, `fedjax-sim`: one file for each group of commands."""
