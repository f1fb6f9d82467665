"""Reading, checking and writing Hugging Face checkpoint folders."""
