"""Samplers with a clock of simulated time: deadlines, hazards, batteries, and the cost of a round."""
