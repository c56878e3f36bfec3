/// Gradients by central differences of a function written in double: what a backward is compared with,
/// without a second derivation of its formula.
#ifndef TESSERA_TESTS_SUPPORT_FINITE_DIFFERENCE_HPP
#define TESSERA_TESTS_SUPPORT_FINITE_DIFFERENCE_HPP

#include <vector>

namespace reference {

using numbers = std::vector<double>;

inline double dot(numbers const& a, numbers const& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// The gradient of f(x) in every element of x. With functions of size 1 and a step of 1e-5 it is good to
/// 1e-9.
template <class F>
numbers gradient(numbers x, F&& f, double step = 1e-5) {
  numbers result(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    auto const held = x[i];
    x[i] = held + step;
    auto const above = f(x);
    x[i] = held - step;
    auto const below = f(x);
    x[i] = held;
    result[i] = (above - below) / (2 * step);
  }
  return result;
}

/// The same for a function that maps each row of `width` elements to its own numbers: f(row, number of the
/// row).
template <class F>
numbers gradient_by_rows(numbers const& x, std::size_t width, F&& f, double step = 1e-5) {
  numbers result;
  for (std::size_t row = 0; width > 0 && row < x.size() / width; ++row) {
    auto const begin = x.begin() + static_cast<std::ptrdiff_t>(row * width);
    auto const part = gradient(
        numbers(begin, begin + static_cast<std::ptrdiff_t>(width)),
        [&](numbers const& values) { return f(values, row); }, step);
    result.insert(result.end(), part.begin(), part.end());
  }
  return result;
}

} // namespace reference

#endif
