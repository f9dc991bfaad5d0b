"""`streamrl bench hung`: the speed of a run in which some rollouts hang until their limit, beside the same run without."""
