"""The penalty in other libraries' training loops."""
