"""What a run says about itself: metrics with their reduction, sampled rollouts, progress and one HTML page."""
