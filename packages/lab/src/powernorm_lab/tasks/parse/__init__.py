"""Dependency trees, the transitions that build them, and what a transition is chosen by.

The transition system is arc-standard (Nivre 2004): a stack of words whose dependents are still
looked for, and a buffer of those that are still to come. SHIFT takes a word from the buffer onto
the stack; LEFT makes the topmost word of the stack the head of the one below it, RIGHT the other
way round, and the dependent leaves the stack. A sentence of n words always takes 2 n transitions.
"""
