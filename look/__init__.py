"""What there is to look at, once a run has written its files."""
