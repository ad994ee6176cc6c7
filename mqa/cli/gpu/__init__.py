"""The GPU suites of `mqa bench`: what is timed (rows), how (device), and what comes of it."""
