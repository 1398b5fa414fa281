"""This study asks how few bits for each number of an update suffice."""
