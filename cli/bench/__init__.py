"""What ``kvferry bench`` measures: hand-overs of a pair of ranks, and what this machine reaches without KVFerry."""
