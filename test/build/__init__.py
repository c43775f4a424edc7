"""What tests share: models, hand-made events and runs, jobs of several processes, a browser."""
