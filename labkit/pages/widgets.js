// What our widgets need to be used by keys alone and by screen readers, and ipywidgets and JupyterLab do not give them.
if (!window.labkitAids) {
  document.head.append(Object.assign(document.createElement("style"), {textContent: `
    .labkit.labkit :focus-visible { outline: 3px solid var(--jp-content-font-color1, #222) !important; outline-offset: -1px }`}))
  window.labkitAids = () => {
    for (const all of document.querySelectorAll(".labkit")) {
      for (const control of all.querySelectorAll("a, button, input, select, summary, [tabindex]")) {
        control.dataset.lmSuppressShortcuts = "true" // else an arrow in a menu moves to the next cell, and "d d" deletes this one
      }
      for (const slider of all.querySelectorAll(".widget-slider")) {
        const [name, readout] = [slider.querySelector("label").textContent, slider.querySelector(".widget-readout")]
        const handles = slider.querySelectorAll(".noUi-handle"), several = handles.length > 1
        handles.forEach((handle, at) => {
          handle.ariaLabel = name + (several ? [" from", " to"][at] : "")
          handle.ariaValueText = several ? readout.textContent.split("-")[at] : readout.textContent
          handle.tabIndex = slider.querySelector(".noUi-target[disabled]") ? -1 : 0
        })
        readout.tabIndex = -1 // it takes text, and does nothing with it
      }
    }
  }
  new MutationObserver(labkitAids).observe(document.body, {childList: true, subtree: true, characterData: true,
                                                           attributes: true, attributeFilter: ["disabled"]})
}
labkitAids()
