"""`python -m jaxcomp_command` is the `jaxcomp` command."""

from jaxcomp_command import main

main()
