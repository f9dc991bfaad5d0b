"""Training backends behind one seam; see `streamrl.trainers.protocol`."""
