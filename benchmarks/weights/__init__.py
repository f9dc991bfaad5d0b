"""`streamrl bench weights`: new weights for a decoding SGLang, ours and its own ways, beside steady decoding."""
