"""`python -m flashcore`: what is there, and why not."""

from ._doctor import doctor

if __name__ == "__main__":
    doctor()
