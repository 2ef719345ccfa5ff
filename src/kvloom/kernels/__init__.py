"""What reads, writes and moves pages. The torch reference is the oracle and the CPU path."""
