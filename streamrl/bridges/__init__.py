"""Ways into streamrl from other systems."""
