"""Learning with a model that is cut between parties: split learning, vertical learning and SplitGNN."""
