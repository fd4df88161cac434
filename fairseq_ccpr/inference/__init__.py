"""Using a trained model: its options, its files, the loaded system, and sentences in batches."""
