"""The run's folder: what it holds, who may write there, and how it is read back."""
