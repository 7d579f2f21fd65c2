"""``make bench``: what homeport costs, as ratios against the bare app in the same run."""

from benchmarks.costs import main

main()
