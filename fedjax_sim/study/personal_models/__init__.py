"""This study asks which models of clients' own serve their owners better than a fine-tuned shared model."""
