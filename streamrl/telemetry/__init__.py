"""What a run says about itself: metric names, metric reports, logs."""
