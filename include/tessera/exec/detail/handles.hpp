/// What an execution space keeps for its operations between calls: one object of each type that they ask for.
#ifndef TESSERA_EXEC_DETAIL_HANDLES_HPP
#define TESSERA_EXEC_DETAIL_HANDLES_HPP

#include <tessera/core/memory.hpp>

namespace tessera::inline TESSERA_ABI::exec::detail {

/// A handle is made from the account that counts its memory, from the space itself, or from nothing.
template <class Handle, class Space>
concept handle_of = std::constructible_from<Handle, memory_account> ||
    std::constructible_from<Handle, Space&> || std::default_initializable<Handle>;

/// Used by one thread at a time. Objects are destroyed in the reverse order of their making, so that one may
/// hold what it took from another.
class handles {
public:
  handles() = default;
  handles(handles const&) = delete;
  handles& operator=(handles const&) = delete;
  ~handles() { clear(); }

  void clear() noexcept {
    while (newest_ != nullptr) {
      auto* const older = newest_->older;
      delete newest_;
      newest_ = older;
    }
  }

  template <class Handle, class Space>
  requires handle_of<Handle, Space> Handle& get(Space& space, memory_account account) {
    for (auto* entry = newest_; entry != nullptr; entry = entry->older)
      if (entry->type == &tag_of<Handle>) return static_cast<holder<Handle>*>(entry)->object;
    holder<Handle>* made = nullptr;
    if constexpr (std::constructible_from<Handle, memory_account>)
      made = new holder<Handle>(account);
    else if constexpr (std::constructible_from<Handle, Space&>)
      made = new holder<Handle>(space);
    else
      made = new holder<Handle>();
    made->type = &tag_of<Handle>;
    made->older = newest_; // after construction, which may have asked for other handles
    newest_ = made;
    return made->object;
  }

private:
  template <class>
  static constexpr char tag_of = 0;

  struct entry_base {
    virtual ~entry_base() = default;
    void const* type = nullptr;
    entry_base* older = nullptr;
  };
  template <class Handle>
  struct holder final : entry_base {
    template <class... From>
    explicit holder(From&... from) : object(from...) {}
    Handle object;
  };

  entry_base* newest_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::exec::detail

#endif
