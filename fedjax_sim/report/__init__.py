"""Writes a run's page; holds the plots and the HTML that pages of runs and studies share."""
