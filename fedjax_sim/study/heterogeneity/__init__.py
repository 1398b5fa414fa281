"""This study asks how different clients are, and how much slower that makes training."""
