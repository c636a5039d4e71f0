"""The penalties, a file each: the object that computes one, and the methods that train with it."""
