"""`streamrl bench trainer`: training steps of the torch trainer beside a plain compiled loop and TRL's loss, on the same batch."""
