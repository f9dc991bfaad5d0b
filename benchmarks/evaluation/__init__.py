"""`bench eval`: a set of problems asked by the evaluator, beside the engine alone with the same requests."""
