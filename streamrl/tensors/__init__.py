"""What a version is made of: digests of its tensors, where they lie in its bytes, and device memory that other processes can open."""
