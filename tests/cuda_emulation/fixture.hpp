/// What the emulation's own tests share: device arrays, launches, and the faults that a piece of code leaves.
#ifndef TESSERA_TESTS_CUDA_EMULATION_FIXTURE_HPP
#define TESSERA_TESTS_CUDA_EMULATION_FIXTURE_HPP

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <cuda_emulation/control.hpp>

namespace fixture {

/// Device memory with the values of a vector, or that nobody has written.
template <class T>
class array {
public:
  explicit array(std::size_t count) : count_(count) {
    REQUIRE(cudaMalloc(&data_, count * sizeof(T)) == cudaSuccess);
  }
  explicit array(std::vector<T> const& values) : array(values.size()) {
    REQUIRE(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  array(array const&) = delete;
  array& operator=(array const&) = delete;
  ~array() { (void)cudaFree(data_); }

  T* data() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> result(count_);
    CHECK(cudaMemcpy(result.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return result;
  }

private:
  T* data_ = nullptr;
  std::size_t count_;
};

struct shape {
  dim3 grid = 1, block = 1;
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};

template <class... Parameters, class... Arguments>
cudaError_t launch(shape const& s, void (*kernel)(Parameters...), Arguments&&... arguments) {
  cudaLaunchConfig_t configuration{};
  configuration.gridDim = s.grid;
  configuration.blockDim = s.block;
  configuration.dynamicSmemBytes = s.shared_bytes;
  configuration.stream = s.stream;
  return cudaLaunchKernelEx(&configuration, kernel, static_cast<Arguments&&>(arguments)...);
}

/// 0, 1, 2, ...
template <class T = float>
std::vector<T> counting(std::size_t count) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<T>(i);
  return values;
}

/// The faults of `body`, which are not printed, as "kind: message". Errors of its calls count as looked at.
template <class F>
std::vector<std::string> faults_of(F&& body) {
  cuda_emulation::print_faults(false);
  body();
  (void)cudaDeviceSynchronize();
  cuda_emulation::print_faults(true);
  (void)cudaGetLastError();
  (void)cuda_emulation::take_unchecked_errors();
  std::vector<std::string> texts;
  for (auto const& fault : cuda_emulation::take_faults())
    texts.push_back(std::string(cuda_emulation::name_of(fault.kind)) + ": " + fault.message);
  return texts;
}

/// Exactly one fault, whose text has all of these in it.
template <class F, class... Text>
void finds(F&& body, Text... wanted) {
  auto const faults = faults_of(body);
  REQUIRE(faults.size() == 1);
  INFO(faults[0]);
  for (std::string const& text : {std::string(wanted)...}) {
    INFO(text);
    CHECK(faults[0].find(text) != std::string::npos);
  }
}
template <class F>
void finds_nothing(F&& body) {
  auto const faults = faults_of(body);
  INFO((faults.empty() ? std::string() : faults[0]));
  CHECK(faults.empty());
}

} // namespace fixture

#endif
