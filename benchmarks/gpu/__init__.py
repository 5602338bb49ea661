"""How fast is training on a GPU, and what does each strategy cost?"""
