"""What lets a run live: nothing here is part of the algorithm."""
