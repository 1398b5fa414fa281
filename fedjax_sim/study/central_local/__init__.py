"""This study asks who should add privacy noise: the server, shares that add up, or every client."""
