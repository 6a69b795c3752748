//! What attention is: the problem, its tensors, the f64 oracle and the gates that judge every backend.
