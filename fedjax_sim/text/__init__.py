"""Text that people see: characters that hide become visible, and bounds are rounded in their safe direction.

Nothing here imports JAX, or any other part of the package.
"""
