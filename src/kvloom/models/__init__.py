"""What kvloom knows of model architectures."""
