"""A stand-in Responses provider; ``--help`` lists what it can do."""

from homeport.testing.provider.__main__ import main

main()
