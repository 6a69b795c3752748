//! Prints flashcore IR as PTX, and reads back what ptxas says of it.
