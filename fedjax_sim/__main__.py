"""`python -m fedjax_sim`: the command line."""

from fedjax_sim.command.app import main

if __name__ == "__main__":
    main()
