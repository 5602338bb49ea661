"""What does compression of gradients cost in accuracy?"""
