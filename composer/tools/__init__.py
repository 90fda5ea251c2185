"""The tools that people run: explain, warm up, benchmark a model, tune many models ahead."""
