"""This study asks what edge servers under a cloud cost, and what they save."""
