"""The task of classifying series of variable length."""
