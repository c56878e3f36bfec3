// Facts about the types of core/ that hold at compile time.
#include <type_traits>

#include <tessera/core/extents.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/core/tensor.hpp>
#include <tessera/core/view.hpp>

namespace {

using namespace tessera;

static_assert(sizeof(index_t) == 8);

// Views are passed by value.
static_assert(std::is_trivially_copyable_v<view<float, 3>>);
static_assert(std::is_trivially_destructible_v<view<float, 3>>);
static_assert(sizeof(view<float, 1>) == sizeof(float*) + 2 * sizeof(index_t));
static_assert(std::is_convertible_v<view<float, 2>, view<float const, 2>>);
static_assert(!std::is_convertible_v<view<float const, 2>, view<float, 2>>);
static_assert(!std::is_convertible_v<view<float, 2>, view<float, 1>>);
static_assert(!std::is_convertible_v<view<float, 2>, view<double, 2>>);

// A tensor owns: it moves and does not copy by accident.
static_assert(std::is_nothrow_move_constructible_v<tensor<float, 2>>);
static_assert(!std::is_copy_constructible_v<tensor<float, 2>>);

// Storage types are what they are on the wire and in files.
static_assert(sizeof(bf16) == 2 && std::is_trivially_copyable_v<bf16>);
static_assert(sizeof(fp16) == 2 && std::is_trivially_copyable_v<fp16>);
static_assert(storage_scalar<float> && storage_scalar<bf16> && storage_scalar<fp16>);
static_assert(!storage_scalar<int>);

} // namespace
