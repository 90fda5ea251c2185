"""The tools that people run: explain a program, benchmark a model, tune many models ahead."""
