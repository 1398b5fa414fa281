"""`python -m fedjax_sim`: the command line."""

from fedjax_sim.cli import main

if __name__ == "__main__":
    main()
