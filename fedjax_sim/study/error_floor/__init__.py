"""This study asks how far from the optimum training with constant steps stays, and why."""
